#pragma once
// The states of a work's splits are folded by the launch behind (fold_pieces.cu): nothing is counted, and nobody waits.

struct NextLaunch {
    template <class Smem, class Line, class Run>
    __device__ static void list(const Args&, Smem&, const Line&, const Run&) {}
    __device__ static void end(const Args&) {}
    template <class Consumer>
    __device__ static void fold(Consumer&, float) {}
};
