"""Runs two recipes for a few steps in one job, since starting a job takes longer than a few steps.

python short_recipes.py FOLDER
"""

import sys

from unitrain.recipes import custom_trainer, language_model

folder = sys.argv[1]
sys.argv[1:] = [f"--output-dir={folder}/language_model", "--max-steps=3", "--width=16", "--sample=20"]
language_model.main()
sys.argv[1:] = [f"--output-dir={folder}/custom_trainer", "--epochs=1"]
custom_trainer.main()
