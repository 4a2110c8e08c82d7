"""Damage valid files in many ways, and read them: each ends in the right result or in an error of a documented kind.

    make test                                                  # some hundred cases
    make test-slow                                             # some thousand cases
    PYTHONPATH=tests python -m fuzz                            # the same thousands, with a count for each reader
    PYTHONPATH=tests python -m fuzz --reader record --seed 7 8 # replay single cases
    PYTHONPATH=tests python -m fuzz --reader record --file x   # read a file as this reader does

`readers` lists every reader of the library, `mutations` how files are damaged, `worker` runs a case in a child process
with limits. A test compares the list with the code, so that a new reader cannot be forgotten.
"""
