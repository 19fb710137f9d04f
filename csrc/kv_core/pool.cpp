// The loops of the pool: allocate with eviction, touch, release.
#include "records.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <vector>

namespace kv_core {

PyTypeObject* tally_type = nullptr;

namespace {

void dealloc_tally(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(reinterpret_cast<PyObject*>(type));
}

PyMemberDef tally_members[] = {
    {"evicted", T_PYSSIZET, offsetof(Tally, evicted), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot tally_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_tally)},
    {Py_tp_members, tally_members},
    {0, nullptr},
};

PyType_Spec tally_spec = {"vllm._kv_core.Tally", sizeof(Tally), 0, Py_TPFLAGS_DEFAULT, tally_slots};

// Removes `block` from the entry of its key in the index: a block, or a dict of blocks by id where several hold the
// same content. Another block's entry stays.
bool forget(Index* index, Block* block) {
  const uint64_t place = find_entry(index, block->hash, hash_of(block->hash));
  if (place == kNowhere) return true;
  PyObject* entry = index->entries[place].value;
  if (entry == as_object(block)) {
    erase_entry(index, place);
    return true;
  }
  if (!PyDict_Check(entry)) return true;
  PyObject* id = PyLong_FromLong(block->id);
  if (id == nullptr) return false;
  const int found = PyDict_Contains(entry, id);
  const bool ok = found >= 0 && (found == 0 || PyDict_DelItem(entry, id) == 0);
  Py_DECREF(id);
  if (!ok) return false;
  const Py_ssize_t left = PyDict_Size(entry);
  if (left == 0) erase_entry(index, place);
  if (left != 1) return true;
  Py_ssize_t position = 0;
  PyObject *key = nullptr, *last = nullptr;
  PyDict_Next(entry, &position, &key, &last);
  assign(index->entries[place].value, last);
  return true;
}

// What is asked of a block: first the text of its hash, and later its place in the index.
void expect_text(const Block* block) {
  if (block->hash == nullptr) return;
  __builtin_prefetch(block->hash);
  __builtin_prefetch(reinterpret_cast<const char*>(block->hash) + 64);
}

void expect_place(const Index* index, const Block* block) {
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
    first_ = first_->next;
  }

  const Block* first_;
  const Block* second_;
  const Block* end_;
  const Index* index_;
};

// What `block.owner` is for this pool; borrowed.
bool is_owned(const Block* block, PyObject* pool, PyObject* weak) {
  return block->owner != nullptr && (block->owner == weak || block->owner == pool);
}

// What hashes may end with.
class Suffixes {
 public:
  explicit Suffixes(PyObject* texts) : texts_(texts) {
    for (Py_ssize_t i = 0; texts_.ok() && i < texts_.size(); ++i) {
      char* text = nullptr;
      Py_ssize_t size = 0;
      if (PyBytes_AsStringAndSize(texts_[i], &text, &size) != 0) return;
      all_.emplace_back(text, size_t(size));
    }
  }
  bool ok() const { return texts_.ok() && Py_ssize_t(all_.size()) == texts_.size(); }
  bool end(PyObject* hash) const {
    const std::string_view text(PyBytes_AsString(hash), size_t(PyBytes_Size(hash)));
    for (const std::string_view suffix : all_) {
      if (text.size() >= suffix.size() && text.substr(text.size() - suffix.size()) == suffix) return true;
    }
    return false;
  }

 private:
  Items texts_;
  std::vector<std::string_view> all_;
};

// A list that is made as long as it may get, and cut when it is done.
class Rows {
 public:
  explicit Rows(Py_ssize_t most) : list_(PyList_New(most)), most_(most) {}
  ~Rows() { Py_XDECREF(list_); }
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;
  bool ok() const { return list_ != nullptr; }
  void add(PyObject* item) {
    Py_INCREF(item);
    PyList_SetItem(list_, count_++, item);
  }
  void drop_all() { count_ = 0; }
  // Borrowed; null with an error.
  PyObject* done() { return PyList_SetSlice(list_, count_, most_, nullptr) == 0 ? list_ : nullptr; }

 private:
  PyObject* list_;
  Py_ssize_t most_;
  Py_ssize_t count_ = 0;
};

// Counts different texts; borrows them.
class Different {
 public:
  explicit Different(Py_ssize_t most) : mask_(1) {
    while (mask_ < 2 * size_t(most)) mask_ *= 2;
    places_.resize(mask_--);
  }
  void add(PyObject* text, uint32_t hash) {
    size_t place = hash & mask_;
    for (; places_[place] != nullptr; place = (place + 1) & mask_) {
      if (is_same(places_[place], text)) return;
    }
    places_[place] = text;
    count_ += 1;
  }
  Py_ssize_t count() const { return count_; }

 private:
  size_t mask_;
  std::vector<PyObject*> places_;
  Py_ssize_t count_ = 0;
};

PyObject* weak_reference(PyObject* pool) {
  PyObject* weak = PyWeakref_NewRef(pool, nullptr);
  if (weak == nullptr) PyErr_Clear();
  return weak;
}

}  // namespace

bool add_tally_type(PyObject* module) {
  tally_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&tally_spec));
  return tally_type != nullptr && PyModule_AddObjectRef(module, "Tally", reinterpret_cast<PyObject*>(tally_type)) == 0;
}

namespace {

// Blocks are mostly taken one at a time: what the next two times need is fetched meanwhile.
void expect_next_takes(const Queue* queue, const Index* index) {
  const Block* first = queue->head->next;
  const Block* second = first == nullptr || first == queue->tail ? nullptr : first->next;
  if (second == nullptr || second == queue->tail) return;
  expect_place(index, first);
  expect_text(second);
  __builtin_prefetch(second->next);
}

// The function that `bind_take` returns; `bound` is a tuple of queue, index, tally and dict of further keys.
PyObject* take(PyObject* bound, PyObject* count) {
  if (PyDict_Size(PyTuple_GetItem(bound, 3)) != 0) Py_RETURN_NONE;
  const Py_ssize_t number = PyLong_AsSsize_t(count);
  if (number == -1 && PyErr_Occurred()) return nullptr;
  Queue* queue = reinterpret_cast<Queue*>(PyTuple_GetItem(bound, 0));
  Index* index = reinterpret_cast<Index*>(PyTuple_GetItem(bound, 1));
  PyObject* taken = pop_front(queue, number);
  const auto block_at = [&taken](Py_ssize_t i) { return reinterpret_cast<Block*>(PyList_GetItem(taken, i)); };
  for (Py_ssize_t i = 0; taken != nullptr && i < number; ++i) {
    if (i + 2 * kAhead < number) expect_text(block_at(i + 2 * kAhead));
    if (i + kAhead < number) expect_place(index, block_at(i + kAhead));
    Block* block = block_at(i);
    block->references = 1;
    if (block->hash == nullptr) continue;
    if (!forget(index, block)) {
      Py_CLEAR(taken);
      break;
    }
    reinterpret_cast<Tally*>(PyTuple_GetItem(bound, 2))->evicted += 1;
    Py_CLEAR(block->hash);
    block->num_tokens = kNoTokens;
  }
  if (taken != nullptr) expect_next_takes(queue, index);
  return taken;
}

PyMethodDef take_definition = {"take", take, METH_O, nullptr};

}  // namespace

// bind_take(queue, index, tally, further_keys) -> function of a count, which returns a list: the front of the queue, each block
// with one reference and without its hash, which leaves the index and is counted. None, and no change, while `further_keys` is
// not empty.
PyObject* bind_take(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (wrong_count("bind_take", count, 4)) return nullptr;
  if (!PyObject_TypeCheck(args[0], queue_type) || Py_TYPE(args[2]) != tally_type || !PyDict_Check(args[3])) {
    PyErr_SetString(PyExc_TypeError, "bind_take needs a native queue, index and tally, and a dict");
    return nullptr;
  }
  if (as_index(args[1]) == nullptr) return nullptr;
  PyObject* bound = PyTuple_Pack(4, args[0], args[1], args[2], args[3]);
  PyObject* function = bound == nullptr ? nullptr : PyCFunction_New(&take_definition, bound);
  Py_XDECREF(bound);
  return function;
}

// touch(pool, queue, blocks) -> None, or a list of blocks of other pools: one more reference for each of the pool's own,
// which leaves the queue if nobody held it. Null blocks are skipped.
PyObject* touch(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (wrong_count("touch", count, 3)) return nullptr;
  if (!PyObject_TypeCheck(args[1], queue_type)) {
    PyErr_SetString(PyExc_TypeError, "touch needs a native queue");
    return nullptr;
  }
  Items items(args[2]);
  if (!items.ok()) return nullptr;
  PyObject* weak = weak_reference(args[0]);
  PyObject* foreign = nullptr;
  bool ok = true;
  for (Py_ssize_t i = 0, n = items.size(); ok && i < n; ++i) {
    Block* block = as_block(items[i]);
    ok = block != nullptr;
    if (!ok || block->is_null) continue;
    if (is_owned(block, args[0], weak)) {
      if (block->references == 0) ok = unlink(reinterpret_cast<Queue*>(args[1]), block);
      if (ok) block->references += 1;
      continue;
    }
    if (foreign == nullptr) foreign = PyList_New(0);
    ok = foreign != nullptr && PyList_Append(foreign, as_object(block)) == 0;
  }
  Py_XDECREF(weak);
  if (!ok) {
    Py_XDECREF(foreign);
    return nullptr;
  }
  if (foreign != nullptr) return foreign;
  Py_RETURN_NONE;
}

// find_cached(queue, depth, suffixes, unwanted, index, coming) -> (blocks, hashes, number, last): of the first `depth` blocks
// those whose hash ends with one of the suffixes and is not in the set `unwanted`, how many different ones of these hashes are in
// neither index, and the last block looked at or None. No blocks and hashes where there is no such one.
PyObject* find_cached(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (wrong_count("find_cached", count, 6)) return nullptr;
  if (!PyObject_TypeCheck(args[0], queue_type) || !PyAnySet_Check(args[3])) {
    PyErr_SetString(PyExc_TypeError, "find_cached needs a native queue and a set");
    return nullptr;
  }
  const Index* index = as_index(args[4]);
  const Index* coming = index == nullptr ? nullptr : as_index(args[5]);
  const Py_ssize_t depth = coming == nullptr ? -1 : PyLong_AsSsize_t(args[1]);
  if (depth == -1 && PyErr_Occurred()) return nullptr;
  const Suffixes suffixes(args[2]);
  if (!suffixes.ok()) return nullptr;
  const bool all_wanted = PySet_Size(args[3]) == 0;
  const Queue* queue = reinterpret_cast<Queue*>(args[0]);
  const Py_ssize_t most = std::max<Py_ssize_t>(0, std::min(depth, queue->size));
  const auto lack = [index, coming](PyObject* text, uint32_t hash) {
    return find_entry(index, text, hash) == kNowhere && find_entry(coming, text, hash) == kNowhere;
  };
  const auto lacks = [&lack](const Block* block) { return block->hash != nullptr && lack(block->hash, hash_of(block->hash)); };
  Block *last = nullptr, *block = queue->head->next;
  Py_ssize_t num_copied = 0;  // mostly the index has everything, and nothing is to be listed
  for (Scout scout(queue, index); num_copied < most && block != nullptr && block != queue->tail && !lacks(block); ++num_copied) {
    scout.step();
    last = block;
    block = block->next;
  }
  const bool has_all = num_copied == most || block == nullptr || block == queue->tail;
  Rows blocks(has_all ? 0 : most), hashes(has_all ? 0 : most);
  if (!blocks.ok() || !hashes.ok()) return nullptr;
  Scout scout(queue, index);
  Different absent(has_all ? 0 : most);
  if (!has_all) block = queue->head->next;
  for (Py_ssize_t i = 0; !has_all && i < most && block != nullptr && block != queue->tail; ++i, block = block->next) {
    scout.step();
    last = block;
    if (block->hash == nullptr || !suffixes.end(block->hash)) continue;
    const int unwanted = all_wanted ? 0 : PySet_Contains(args[3], block->hash);
    if (unwanted < 0) return nullptr;
    if (unwanted > 0) continue;
    blocks.add(as_object(block));
    hashes.add(block->hash);
    const uint32_t hash = hash_of(block->hash);
    if (lack(block->hash, hash)) absent.add(block->hash, hash);
  }
  if (absent.count() == 0) blocks.drop_all(), hashes.drop_all();
  PyObject *found = blocks.done(), *keys = hashes.done();
  if (found == nullptr || keys == nullptr) return nullptr;
  return Py_BuildValue("OOnO", found, keys, absent.count(), last == nullptr ? Py_None : as_object(last));
}

// lacking(index, hashes) -> list: those of the hashes that the index has no entry for, in order.
PyObject* lacking(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (wrong_count("lacking", count, 2)) return nullptr;
  const Index* index = as_index(args[0]);
  if (index == nullptr) return nullptr;
  Items hashes(args[1]);
  if (!hashes.ok()) return nullptr;
  PyObject* absent = PyList_New(0);
  bool ok = absent != nullptr;
  for (Py_ssize_t i = 0, n = hashes.size(); ok && i < n; ++i) {
    PyObject* hash = hashes[i];
    if (!PyBytes_Check(hash)) {
      PyErr_SetString(PyExc_TypeError, "keys of the index are bytes");
      ok = false;
    } else if (index->used == 0 || find_entry(index, hash, hash_of(hash)) == kNowhere) {
      ok = PyList_Append(absent, hash) == 0;
    }
  }
  if (!ok) Py_CLEAR(absent);
  return absent;
}

// block_ids(blocks) -> list of their ids.
PyObject* block_ids(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (wrong_count("block_ids", count, 1)) return nullptr;
  Items items(args[0]);
  PyObject* ids = items.ok() ? PyList_New(items.size()) : nullptr;
  for (Py_ssize_t i = 0; ids != nullptr && i < items.size(); ++i) {
    const Block* block = as_block(items[i]);
    PyObject* id = block == nullptr ? nullptr : PyLong_FromLong(block->id);
    if (id == nullptr) {
      Py_CLEAR(ids);
    } else {
      PyList_SetItem(ids, i, id);
    }
  }
  return ids;
}

// token_counts(blocks) -> memory of 32-bit numbers: how many tokens their hashes cover, or kNoTokens.
PyObject* token_counts(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (wrong_count("token_counts", count, 1)) return nullptr;
  Items items(args[0]);
  const Py_ssize_t number = items.ok() ? items.size() : 0;
  PyObject* bytes = items.ok() ? PyBytes_FromStringAndSize(nullptr, number * Py_ssize_t(sizeof(uint32_t))) : nullptr;
  char* place = bytes == nullptr ? nullptr : PyBytes_AsString(bytes);
  for (Py_ssize_t i = 0; bytes != nullptr && i < number; ++i, place += sizeof(uint32_t)) {
    const Block* block = as_block(items[i]);
    if (block == nullptr) {
      Py_CLEAR(bytes);
    } else {
      std::memcpy(place, &block->num_tokens, sizeof(uint32_t));
    }
  }
  PyObject* memory = bytes == nullptr ? nullptr : PyMemoryView_FromObject(bytes);
  PyObject* numbers = memory == nullptr ? nullptr : PyObject_CallMethod(memory, "cast", "s", "I");
  Py_XDECREF(bytes);
  Py_XDECREF(memory);
  return numbers;
}

// count_before(queue, limit, hashes) -> int: how many blocks, `limit` at most, are in front of the first whose hash is in the
// set `hashes`.
PyObject* count_before(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (wrong_count("count_before", count, 3)) return nullptr;
  if (!PyObject_TypeCheck(args[0], queue_type) || !PyAnySet_Check(args[2])) {
    PyErr_SetString(PyExc_TypeError, "count_before needs a native queue and a set");
    return nullptr;
  }
  const Py_ssize_t limit = PyLong_AsSsize_t(args[1]);
  if (limit == -1 && PyErr_Occurred()) return nullptr;
  const Queue* queue = reinterpret_cast<Queue*>(args[0]);
  Py_ssize_t before = 0;
  for (Block* block = queue->head->next; before < limit && block != nullptr && block != queue->tail; block = block->next) {
    const int found = block->hash == nullptr ? 0 : PySet_Contains(args[2], block->hash);
    if (found < 0) return nullptr;
    if (found != 0) break;
    before += 1;
  }
  return PyLong_FromSsize_t(before);
}

// release(pool, blocks, cached, uncached) -> None, or a list of blocks of other pools: one reference less for each of the pool's
// own; those nobody holds now are appended to `cached` if they have a hash, else to `uncached`. Null blocks are skipped.
PyObject* release(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (wrong_count("release", count, 4)) return nullptr;
  Items items(args[1]);
  if (!items.ok()) return nullptr;
  PyObject* weak = weak_reference(args[0]);
  PyObject* foreign = nullptr;
  bool ok = true;
  for (Py_ssize_t i = 0, n = items.size(); ok && i < n; ++i) {
    Block* block = as_block(items[i]);
    ok = block != nullptr;
    if (!ok || block->is_null) continue;
    if (!is_owned(block, args[0], weak)) {
      if (foreign == nullptr) foreign = PyList_New(0);
      ok = foreign != nullptr && PyList_Append(foreign, as_object(block)) == 0;
    } else if (block->references <= 0) {
      PyErr_Format(invariant_error, "block %d is freed but nobody holds it", block->id);
      ok = false;
    } else if (--block->references == 0) {
      ok = PyList_Append(block->hash != nullptr ? args[2] : args[3], as_object(block)) == 0;
    }
  }
  Py_XDECREF(weak);
  if (!ok) {
    Py_XDECREF(foreign);
    return nullptr;
  }
  if (foreign != nullptr) return foreign;
  Py_RETURN_NONE;
}

}  // namespace kv_core
