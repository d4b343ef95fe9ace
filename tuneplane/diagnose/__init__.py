"""Why a run is as it is: evidence gathered once, rules that judge it, one sentence of cause.

`tp job why` calls `gather`, then `diagnose`. Evidence is plain data: a case of it can be saved and judged again.
"""
