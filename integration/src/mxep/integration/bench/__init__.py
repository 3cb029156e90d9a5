"""task=bench: how fast things are, beside a ceiling measured in the same run.

    timing   how long a call takes on the GPU; the copy ceiling; empty kernels; torch.compile
    report   lines of results as a table and as JSON
    quant    the kernels of mxep.quant, by the cases of quant_cases
    run      from a config to a report

A bench is a module of the table below, with `check(config)` and `measure(config, seed, say)`; timing and report know
nothing of what it measures.
"""

BENCHES = {"quant": "mxep.integration.bench.quant"}
"""Name in the config -> module."""
