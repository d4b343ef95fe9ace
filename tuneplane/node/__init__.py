"""The node agent: claims an attempt, runs the job's command on one node, records how it ended."""
