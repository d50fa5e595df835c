"""Distillation of a float chat model into a ternary one: ``python -m examples.train distill STAGE``.

In the order in which a run needs them: ``bundle`` gathers the files, ``sample`` lets the teacher write conversations,
``train`` fits the student to the teacher's distribution, ``evaluate`` and ``samples`` measure it, ``export`` writes a
checkpoint folder. ``run`` is sample, train, evaluate and samples in one process, which keeps the teacher's states.

Both nets are functions of weights that are stacked over the layers, not modules of ``model.py``: one compiled function
serves all blocks of the full pass and two the decoding, and the optimizer has a dozen tensors instead of hundreds.
"""
