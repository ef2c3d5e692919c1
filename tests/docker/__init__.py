"""The images and templates in docker/."""
