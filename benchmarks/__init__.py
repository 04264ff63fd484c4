"""Measurements: each module of a floor has ``main(args) -> exit code`` and is run by ``headrace bench NAME``.

    data_plane   messages, tokens and weights on their way        gpu    one card
    jobs         whole jobs on real processes                     vllm   beside vLLM
    decisions    a scheduler's decisions, by themselves
    papers       published experiments, again                     peers  other systems on the same work
    serving      strangers' programs on one server
    check_gpu    ``make check-gpu``                               namespaces   hosts made of network namespaces

What several floors need stands here, in files whose names begin with ``_``.
"""
