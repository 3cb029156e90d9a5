"""Benchmarks. They are in mxep's repository, but not in its wheels.

`mxep task=bench bench=NAME` measures the shapes of configs/bench, with baselines and a ceiling from the same run:
quant, gemm, linear, comms, layer, model. A bench is a module with SECTIONS (name -> report.Section, its tables), SHAPES
and measure(Bench), which yields (section, row) pairs. `script` checks a bench's config and runs it, `timer` times.

`compare` (losses over seeds) and `estimate` are tasks of their own.

Scripts, `python integration/benchmarks/NAME.py`, need mxep-integration[command]. Docstrings have their commands:

    first_step, lengths           a first step; sequence lengths that never repeat, for a layer and for a model
    front_page                    the README's picture, from docs/results
    frozen, lora_model            experts frozen in MXFP8, MXFP4 or block FP8; LoRA of whole models
    peers, peer_exchange          layers and exchanges of peers and of mxep (docs/lab/peers.md, comms.md)
    titan                         torchtitan's trainer
"""
