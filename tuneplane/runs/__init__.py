"""Runs as the login side sees them: made, found, judged, read, stopped. Imports neither Hydra nor submitit."""
