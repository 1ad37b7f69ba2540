#pragma once
// This is what the host must know of a kernel to launch it: it reads the kernel's `facts`, so that no size is computed twice.
#include "ptx/base.cuh"

struct Facts {
    u32 smem_bytes, args_bytes, threads;
    u32 uses_pdl;          // whether the kernel may begin before the launch in front of it has ended, as it waits for that one itself
    u32 needs_all_blocks;  // whether blocks wait for blocks with larger numbers, so that all must run at once
};
