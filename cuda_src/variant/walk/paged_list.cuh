#pragma once
// The same over keys in pages: the first warp loads together, each lane the rows of one page. Which page that is, it asks a tile ahead.
#include "variant/walk/list.cuh"

struct PagedListWalk : ListWalk {
    template <class K, class KTile, class VTile> using Contract = PanelsKvOption<K, KTile, VTile>;
    struct Board : ListWalk::Board {
        Kv::Board pages;

        __device__ void init() { ListWalk::Board::init(), pages.init(); }
    };
    using ListWalk::ListWalk;

    template <class Producer>
    __device__ static void produce(Producer& producer) {
        if (threadIdx.x >= 32) return find_works(producer);
        load_works(producer, [&](Reader& reader, const WorkTile& work, Visit first) {
            if (first.classes) load(producer, reader, work, first);
        });
    }
    template <class Producer>
    __device__ static void load(Producer& producer, Reader& reader, const WorkTile& work, Visit at) {
        const Rows rows(producer.args, work.batch);
        const Kv source(producer.args, rows, work);
        const Mask mask(producer.args, rows, work);
        const auto find = [&](Visit x) { return Kv::at(producer.smem.board.pages, x.tile, x.classes ? source.find(x.tile) : -1); };
        auto before = find({0, 0}), here = find(at);
        for (bool first = true; at.classes; first = false) {
            const Visit after = reader.next();
            const auto there = find(after);
            const typename Columns<Mask>::Made columns(mask, at.tile, is_cut(at.classes));
            producer.await_k();
            columns.leave(producer.smem.board.columns[producer.kv.stage]);
            if (threadIdx.x == 0) producer.smem.board.entry[producer.kv.stage] = {at.tile, after.classes};
            producer.load_k(source, here);
            if (!first) producer.load_v(source, before);
            else if (threadIdx.x == 0) producer.load_q(rows, work);
            __syncwarp();
            if (first) producer.q.advance();
            before = here, here = there, at = after;
            producer.kv.advance();
        }
        producer.load_v(source, before);
        __syncwarp();
    }
};
