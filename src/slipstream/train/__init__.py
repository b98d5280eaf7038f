"""Training: recipe, loop, checkpoints, launch; nothing is imported here, so that pure parts stay so."""
