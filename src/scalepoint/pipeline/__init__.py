"""The pipeline: deploy, deploy_checkpoint and sweep. They share options, output folder handling and result type.

    deploy.py            order of the steps                  job.py            arguments, checked before any work
    stages.py            quantize, export, verify, evaluate  inputs.py         example and calibration data
    context.py           what stages share; captures once    workspace.py      the output folder
    search.py            which config to try next            cache.py          finished stages, for resume
    sweep.py             deploy over a grid                  result.py         Trial, Limits, Deployment
    build_report.py      results -> Report                   reproduction.py   config.yaml, reproduce.py
    data_warnings.py     data that the file will not accept

    deploy_checkpoint.py, checkpoint_job.py, checkpoint_stages.py    the same for the folder of a language model
    checkpoint_codes.py  tuned codes for the file formats    perplexity.py, kv_cache.py

The public functions are exported by the package scalepoint. cache.py and workspace.py do not import torch.
"""
