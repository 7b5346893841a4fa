"""A fuzzer of every decoder of bytes from outside: `python -m tests.fuzz_decoders --inputs 1000000 --seed S`.

Each input is a real one that was damaged: in its bytes, its depth, its sizes, its types, with lone surrogates, with
keys twice. Whatever comes, a decoder answers or raises its own error, whose text is short and can be encoded.
"""
