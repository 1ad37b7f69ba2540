import sys, torch, time
from perf.lib import sets, steps
from rawattn.command import timing
name, i, kernel = sys.argv[1], int(sys.argv[2]), sys.argv[3]
case = sets.SETS[name][i]
print(sets.label(case), flush=True)
task = steps.Caches(case)
call = steps.prepare("ours", task, kernel)
def say(what):
    torch.cuda.synchronize(); print("ok", what, flush=True)
with call.context():
    for k in range(5): call.run(); say(f"run {k}")
    for k in range(6): call.run()
    say("six in a row")
    s = torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        call.run(); s.synchronize(); say("other stream")
        for k in range(6): call.run()
        s.synchronize(); say("six there")
        g = torch.cuda.CUDAGraph(); g.capture_begin(capture_error_mode="thread_local")
        for k in range(2): call.run()
        g.capture_end(); say("captured")
    for k in range(4): g.replay(); say(f"replay {k}")
check = steps.Check(task)
print("error", check(call))
