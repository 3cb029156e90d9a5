"""Benchmarks. They are in mxep's repository, but not in its wheels.

`mxep task=bench bench=NAME` measures the shapes of configs/bench, with baselines and a ceiling from the same run:
quant, gemm, linear, comms, layer, model. A bench is a module with SECTIONS (name -> report.Section, its tables), SHAPES
and measure(Bench), which yields (section, row) pairs. `runner` checks a bench's config and runs it, `timer` times.

`compare` (losses over seeds) and `estimate` are tasks of their own.

Scripts, `python integration/benchmarks/NAME.py`, each with its command in its docstring:

    front_page            the README's picture, from docs/results
    lora_model            LoRA of whole models over frozen experts
    peers                 layers of peers and of mxep (docs/lab/peers.md)
    titan                 torchtitan 0.2's trainer
"""
