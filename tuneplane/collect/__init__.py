"""Reading what jobs report, on the login side: points, attempts merged into series, curves in the terminal."""
