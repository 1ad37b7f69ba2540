"""This package reads and makes arrays of all libraries, and knows tensor maps.

array.py has what an array is, reading.py how it is read of each library, and forms.py what of it a plan depends on. making.py
makes new ones; conversion.py gives views, copies on the host and results. torch_state.py knows torch's classes, and what torch
does with a call; eager.py keeps torch.compile away. memory.py finds arrays that share memory, tma.py what tensor maps can read.
"""
