"""Attacks on a server, for which users trust each other with nothing.

    make test                                    the quick part: each attack alone, 300 generated requests
    make test-hostile                            the slow part: all attacks at once, 10,000 requests, kills of workers
    TRIBE_HOSTILE_SECONDS=600 make test-hostile  all attacks at once for ten minutes, on each kind of store
    TRIBE_HOSTILE_REQUESTS=20000 TRIBE_HOSTILE_SEED=1 make test-hostile
    TRIBE_KILLS=100 TRIBE_KILL_STREAMS=16 make test-hostile

`attacks.py` is a table of attacks; a new one is a function of one round. `tenants.py` starts ``tribe serve`` and is the
victim, whose answers and states must equal their replay by the library. `test_two_tenants.py` brings both together.
`generated.py` makes requests from a seed; `test_generated_requests.py` sends them. All of it talks to loopback alone.
"""
