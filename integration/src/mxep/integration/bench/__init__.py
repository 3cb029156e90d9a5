"""task=bench: how fast things are, beside a ceiling measured in the same run.

    timing   how long a call takes on the GPU; the copy ceiling; empty kernels; torch.compile
    meter    the chip's clock and power meanwhile
    report   lines of results beside one ceiling, as a table and as JSON
    tables   the same for rows of alternatives, in sections
    quant    the kernels of mxep.quant, by the cases of quant_cases
    gemm     mxep.gemm beside its peers: gemm_cases what is compared, gemm_numerics how exact it is, roofline a picture
    comms    mxep.comms on all ranks beside all-to-alls: comms_cases what is compared, comms_verify that it is right,
             comms_timing the clock of many ranks, comms_picture a picture
    layer    mxep.ep's layer on all ranks beside the standard one (standard): layer_cases what is compared, layer_counts
             flops, bytes and the floor, layer_verify that it is right, layer_timing sustained time and memory,
             layer_stages kernels by stage, layer_picture a picture
    run      from a config to a report

A bench is a module of the table below, with `check(config)` and `measure(config, seed, say)`, or, if it runs on all
ranks, `measure_on_rank(rank, config, seed, say)`; timing, report and tables know nothing of what it measures.
"""

BENCHES = {
    "quant": "mxep.integration.bench.quant",
    "gemm": "mxep.integration.bench.gemm",
    "comms": "mxep.integration.bench.comms",
    "layer": "mxep.integration.bench.layer",
}
"""Name in the config -> module."""

ON_RANKS = ("comms", "layer")
"""Those that run on all ranks."""

PICTURES = {
    "gemm": "mxep.integration.bench.roofline",
    "comms": "mxep.integration.bench.comms_picture",
    "layer": "mxep.integration.bench.layer_picture",
}
"""Name in the config -> module with `draw(results, file)`."""
