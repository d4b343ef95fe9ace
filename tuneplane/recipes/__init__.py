"""Recipes: what the catalog publishes, what an experiment locked of it, and the adapters that start trainers.

Importing this package costs nothing: its adapters travel in the kernel (standard library, Python 3.9).
"""
