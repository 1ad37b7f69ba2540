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
        const auto at_page = [&](i32 tile, i32 found) { return Kv::at(producer.smem.board.pages, tile, source.page(tile, found)); };
        auto before = Kv::at(producer.smem.board.pages, 0, -1);
        i32 found = source.find(at.tile);
        for (bool first = true; at.classes; first = false) {
            const Visit after = reader.next();
            const auto here = at_page(at.tile, found);
            found = after.classes ? source.find(after.tile) : -1;
            const typename Columns<Mask>::Made columns(mask, at.tile, is_cut(at.classes));
            producer.await_k();
            columns.leave(producer.smem.board.columns[producer.kv.stage]);
            if (threadIdx.x == 0) producer.smem.board.entry[producer.kv.stage] = {at.tile, after.classes};
            producer.load_k(source, here);
            if (!first) producer.load_v(source, before);
            else if (threadIdx.x == 0) producer.load_q(rows, work);
            __syncwarp();
            if (first) producer.q.advance();
            before = here, at = after;
            producer.kv.advance();
        }
        producer.load_v(source, before);
        __syncwarp();
    }
};
