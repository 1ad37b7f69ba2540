#pragma once
// The queries of Base, whose rows have the columns from cfg::rotary_first on alone.

template <class Base>
struct RopeQueries : Base {
    static constexpr int first_column = cfg::rotary_first;
    using Base::Base;
};
