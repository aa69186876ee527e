"""`make e2e`: the real SGLang server on a GPU, with and without the patch, on small checkpoints with random weights.

`plan.py` says which servers there are, `server.py` keeps them, `client.py` asks them. Each of `tokens.py`, `speed.py`,
`load.py` and `ranks.py` is one run: what it asks, what it writes down, and the bars it has. `report.py` shows a result.
"""
