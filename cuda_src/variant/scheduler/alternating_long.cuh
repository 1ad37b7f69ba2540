#pragma once
// Groups of heads of long packed sequences alternate. Short ones, at several of which blocks work at once, all descend but the last: where
// one ascends, its works wait for each other in front of its last query tile, and with them the works that their blocks have drawn ahead.
#include "variant/scheduler/alternating.cuh"

struct AlternatingLong : Alternating {
    static constexpr bool short_descend = true;
};
