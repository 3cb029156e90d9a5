"""task=bench: how fast things are, beside baselines and a ceiling that are measured in the same run.

    names     what a config may name
    run       from a config to a report
    picture   a report as a picture
    quant     kernels of mxep.quant
    gemm      mxep.gemm beside its peers: gemm_cases what is compared
    linear    mxep.gemm's linear beside torch's and torchao's
    comms     mxep.comms on all ranks beside all-to-alls: comms_cases what is compared
    layer     mxep.ep's layer on all ranks beside baseline's: layer_cases what is compared, layer_work what
              it must do at least, layer_stages where its time goes
    model     whole models of transformers on all ranks, with mxep's experts, the baseline's or their own

A bench is a module with
    SECTIONS   name -> Section: its tables
    measure    (Bench) -> (section, row), one after the other
What a config may name of it is in names, which needs no torch.
"""
