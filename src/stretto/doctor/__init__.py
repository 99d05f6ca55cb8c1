"""The checks of `stretto doctor`: ranks collect and exchange facts; pure functions check them.

`local_facts` inspects this machine, `port_probe` and `exchange_facts` reach the peers, `checks` and
`machine_checks` turn the facts of all ranks into findings. `gather_facts` collects and exchanges
them within a time limit.
"""
