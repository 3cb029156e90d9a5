"""How fast mxep is: benchmarks that lie in its repository and in no wheel.

`mxep task=bench bench=NAME`, on shapes of configs/bench, beside baselines and a ceiling measured in the same run:

    quant     kernels of mxep.quant
    gemm      grouped GEMMs, and forward + backward of them
    linear    linears
    comms     dispatch and combine on all ranks, beside all-to-alls
    layer     the MoE layer on all ranks, compared with the baseline; layer_cases defines the cases and their work
    model     whole models of transformers, with mxep's experts, the baseline's or their own

A bench is a module with SECTIONS (name -> report.Section, its tables), SHAPES and measure(Bench), which yields
(section, row) pairs. `runner` checks a bench's config and runs it; `timer` times.

Tasks of their own: `compare` (task=compare: losses over seeds), `estimate` (task=estimate).

Scripts, `python integration/benchmarks/NAME.py`, each with its command in its docstring:

    front_page    the README's picture, from docs/results
    frozen        layers with experts frozen in MXFP8, MXFP4 or block FP8
    lengths       steps of lengths that never come twice
    lora_model    LoRA of whole models
    peers         layers and GEMMs of peers and of mxep, each in its own process (docs/lab/peers.md)
    step          a whole training step with its optimizer, in TFLOP/s as NVIDIA counts them
    titan         torchtitan 0.2's trainer with its experts and with mxep's
"""
