"""What login side and node side share, with nothing but the standard library of Python 3.9."""
