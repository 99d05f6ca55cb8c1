"""What `stretto doctor` does: each rank looks around, all tell one another, pure checks judge.

`facts` looks at this machine, `door` and `meet` reach the peers, `checks` turns what all ranks saw
into findings, `examine` puts them in order and keeps the whole within its time.
"""
