// Known tokens by row: pages taken for new ones, and the chain sums of the pages they complete.
#pragma once
#include "prefix.cuh"

// Gives a token page to each thread that asks, in thread order; 0 if it got none.
DEVICE i32 pop_token_page(const State& s, Scratch& scratch, bool is_wanted) {
    i32 num_wanted, rank = block_rank(scratch, is_wanted, num_wanted);
    i32 num_free = *s.num_free_token_pages;
    bool is_given = is_wanted && rank < num_free;
    i32 page = is_given ? s.free_token_pages[num_free - 1 - rank] : 0;
    __syncthreads();
    if (threadIdx.x == 0) {
        i32 num_missing = num_wanted > num_free ? num_wanted - num_free : 0;
        *s.num_free_token_pages = num_free - (num_wanted - num_missing);
        if (num_missing > 0) atomicAdd(s.error + ERROR_NO_TOKEN_PAGE, num_missing);
    }
    return page;
}

// Adds the link of the page that the row's newest token completed.
DEVICE void extend_chain(const State& s, i32 row, i32 num_tokens) {
    i32 page = num_tokens / s.page_size - 1;
    PageView view = page_view(s, row, page);
    u64 before = page > 0 ? page_chain(s, row, page - 1) : root_sum(s.salt[row]);
    u64 content = 0;
#pragma unroll 4
    for (i32 i = 0; i < s.page_size; ++i) content += token_term(view.tokens[i], i);
    *view.link = (i64)(before + page_term(content, page));
}
