"""FX passes: one fusion a file, and the pipeline that runs them and expands the rest.

`names` says which there are and costs nothing to import; `pipeline` brings Inductor with it.
"""
