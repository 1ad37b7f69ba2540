"""packstrip.py OUT FILE.pkl|set:...: as pack.py, with the line tables of machine code made zeros, which are three quarters of what xz leaves."""
import dataclasses, pathlib, pickle, struct, subprocess, sys
from perf.lib import ours, sets
from rawattn.compile import compiler
from rawattn.driver.device import TYPICAL
def zeroed(c):
    c = bytearray(c)
    shoff = struct.unpack_from("<Q", c, 0x28)[0]; size, n, at = struct.unpack_from("<HHH", c, 0x3A)
    secs = [struct.unpack_from("<IIQQQQIIQQ", c, shoff + i * size) for i in range(n)]
    for s in secs:
        begin = secs[at][4] + s[0]; name = bytes(c[begin:c.index(b"\0", begin)]).decode()
        if name in (".debug_line", ".debug_str", ".nv_debug_line_sass", ".nv_debug_ptx_txt"): c[s[4]:s[4] + s[5]] = bytes(s[5])
    return bytes(c)
if __name__ == "__main__":
    found = {}
    for name in sys.argv[2:]:
        if name.startswith("set:"):
            name, _, configs = name[4:].partition("=")
            for s in ours.sources({c: configs.split(",") if configs else ["ours"] for c in sets.SETS[name]}, TYPICAL["sm_90a"]): found[s.key] = s
        else: found |= pickle.load(open(name, "rb"))
    folder, to, n = compiler._find_folder(), pathlib.Path("/tmp/strip/gpucache"), 0
    subprocess.run(["rm", "-rf", str(to)]); to.mkdir(parents=True)
    for s in found.values():
        b = compiler._read(folder, s)
        if b is None: continue
        n += 1; entry = compiler._find_entry(to, s)
        entry.write_bytes(compiler.pack(dataclasses.replace(b, cubin=zeroed(b.cubin))))
    print(len(found), n, flush=True)
    subprocess.run(f"cd /tmp/strip && ls gpucache | sort | sed 's#^#gpucache/#' > list.txt && tar -T list.txt -I 'xz -T2 -6' -cf {sys.argv[1]}", shell=True, check=True)
