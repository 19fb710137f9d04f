// Fetches from memory what a walk over the free queue is about to need.
#pragma once

#include "records.h"

namespace kv_core {

// What is asked of a block: first the text of its hash, and later its place in the index.
inline void expect_text(const Block* block) {
  if (block->hash == nullptr) return;
  __builtin_prefetch(block->hash);
  __builtin_prefetch(reinterpret_cast<const char*>(block->hash) + 64);
}

inline void expect_place(const Index* index, const Block* block) {
  if (index->used != 0 && block->hash != nullptr) expect_entry(index, hash_of(block->hash));
}

constexpr int kAhead = 8;  // blocks between a fetch and the use of what it brings

// Runs ahead of a walk over the queue, so that what the walk asks of a block is on its way when it gets there: first the
// block's hash, then its place in the index.
class Scout {
 public:
  Scout(const Queue* queue, const Index* index) : first_(queue->head->next), second_(first_), end_(queue->tail), index_(index) {
    for (int i = 0; i < kAhead; ++i) step_first();
    for (int i = 0; i < kAhead; ++i) step();
  }
  void step() {
    step_first();
    if (is_over(second_)) return;
    expect_place(index_, second_);
    second_ = second_->next;
  }

 private:
  bool is_over(const Block* block) const { return block == nullptr || block == end_; }
  void step_first() {
    if (is_over(first_)) return;
    expect_text(first_);
    expect_followers(first_, first_->next);
    first_ = first_->next;
  }

  const Block* first_;
  const Block* second_;
  const Block* end_;
  const Index* index_;
};

}  // namespace kv_core
