"""The packages, which are found, so that nothing lists the folders of features: the rest is in pyproject.toml."""

from setuptools import find_packages, setup

# backends/ and recipes/ stand at the top of the tree and are installed as unitrain.backends and unitrain.recipes.
beside = find_packages(include=["backends", "backends.*", "recipes", "recipes.*"])
setup(packages=[*find_packages(include=["unitrain", "unitrain.*"]), *(f"unitrain.{name}" for name in beside)])
