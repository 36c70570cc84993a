"""Parts of resnet.py."""
