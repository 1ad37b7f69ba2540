import os
w = os.environ.get("PYTEST_XDIST_WORKER", "")
if w: os.environ["CUDA_VISIBLE_DEVICES"] = str(int(w[2:]) % 2)
