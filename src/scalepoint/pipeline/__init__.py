"""The pipeline: deploy, deploy_checkpoint and sweep over one set of options, one output policy and one result type.

    deploy.py        the order of the steps               job.py           arguments, checked before any work
    stages.py        capture, quantize, export, verify    inputs.py        example and calibration data
    search.py        which config to try next             workspace.py     the output folder
    sweep.py         deploy over a grid                   cache.py         finished stages, for resume
    build_report.py  results -> Report                    result.py        Trial, Limits, Deployment

    deploy_checkpoint.py    the same for the folder of a language model, block by block
    checkpoint_job.py       its arguments                 checkpoint_stages.py   its stages
    checkpoint_codes.py     tuned codes for the formats   perplexity.py, kv_cache.py

The public functions are names of the package scalepoint. cache.py and workspace.py import no torch.
"""
