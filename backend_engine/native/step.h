// What is told to the library, as C structures; bindings.py has the same. All arrays are the caller's, contiguous and
// alive for as long as they are used; sizes are in the types' elements.
#pragma once

#include <cstdint>

#include "products.h"

extern "C" {

struct LayerSpec {
    Matrix qkv, out, gate_up, down;
    const float *input_norm, *post_norm;
    const float *qk_norm;              // [heads + kv_heads, head_dim] or null
    const float *out_norm, *down_norm;  // of what is added to the residual, or null
    const float *inverse_frequencies;  // [head_dim / 2]
    float rope_scaling;
    int32_t window;  // 0: all keys
};

struct ModelSpec {
    int32_t layers, hidden, heads, kv_heads, head_dim, ffn, vocab;
    int32_t kind;  // of weights: 0 float32, 1 bfloat16 (with a pool of bfloat16), 2 int8
    int32_t gelu;  // the gate's activation: 0 silu, 1 gelu by tanh
    float eps, scale, embedding_scale;
    Matrix embedding, head;  // no bias
    const float *norm;
    const LayerSpec *layer;
};

struct StepSpec {  // see StepBatch
    int32_t rows, requests, logit_rows, pages_width, page_size, threads;
    int64_t slots;  // of the pool
    const int64_t *ids, *positions, *row_slots, *logit_row;
    const int32_t *visible, *query_start, *page_table;
    void *pool;     // [layers, 2, slots, kv_heads, head_dim]
    float *hidden;  // [logit_rows, hidden]
};

struct AttendSpec {  // of a layer, over a pool of float32
    int32_t requests, heads, kv_heads, head_dim, pages_width, page_size, window, threads;
    int64_t slots;
    const int32_t *visible, *query_start, *page_table;
    const float *q, *k, *v;  // [rows, heads, head_dim], [slots, kv_heads, head_dim]
    float *out;              // [rows, heads, head_dim]
    float scale;
};

struct TurnSpec {  // queries and keys are normed by head where there is a norm, and turned; keys and values go to slots
    int32_t rows, heads, kv_heads, head_dim;
    int64_t pool_slots;
    const float *qkv;              // [rows, heads + 2 * kv_heads, head_dim]
    const float *cosines, *sines;  // [rows, head_dim], sines with their signs
    const float *norm;             // [heads + kv_heads, head_dim] or null
    const int64_t *slots;          // [rows]
    float *q, *k, *v;              // [rows, heads, head_dim], [slots, kv_heads, head_dim]
    float eps;
};
}

constexpr int MOST_ROWS = 64;

enum Outcome { DONE = 0, WRONG_ID = 1, WRONG_PLACE = 2, NO_MEMORY = 3 };
