"""task=bench: how fast things are, beside a ceiling measured in the same run.

    timing   how long a call takes on the GPU; the copy ceiling; empty kernels; torch.compile
    meter    the chip's clock and power meanwhile
    report   lines of results beside one ceiling, as a table and as JSON
    tables   the same for rows of alternatives, in sections
    quant    the kernels of mxep.quant, by the cases of quant_cases
    gemm     mxep.gemm beside its peers: gemm_cases what is compared, gemm_numerics how exact it is, roofline a picture
    run      from a config to a report

A bench is a module of the table below, with `check(config)` and `measure(config, seed, say)`; timing, report and tables
know nothing of what it measures.
"""

BENCHES = {"quant": "mxep.integration.bench.quant", "gemm": "mxep.integration.bench.gemm"}
"""Name in the config -> module."""
