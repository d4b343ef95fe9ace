"""Training data and models as a submit finds them: looked at on the login side, so that the queue is not the test.

Nothing heavy is imported; pyarrow reads parquet where this host has it.
"""
