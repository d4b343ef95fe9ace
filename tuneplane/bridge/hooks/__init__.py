"""Hooks: one module for each framework that is to report without its user's help, with an `install()`.

Installed by the bridge before the entry runs (`--hook NAME`). None imports its framework: the program does.
"""
