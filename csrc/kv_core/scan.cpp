// Looks over the free queue, without changing anything.
#include "scout.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace kv_core {

namespace {

// What hashes may end with: mostly the number of a group in four bytes.
class Suffixes {
 public:
  // False with an error for what is no sequence of bytes.
  bool add_all(PyObject* texts) {
    Items items(texts);
    for (Py_ssize_t i = 0; items.ok() && i < items.size(); ++i) {
      char* text = nullptr;
      Py_ssize_t size = 0;
      if (PyBytes_AsStringAndSize(items[i], &text, &size) != 0) return false;
      all_.emplace_back(text, size_t(size));
    }
    return items.ok();
  }
  bool end(PyObject* hash) const {
    char* text = nullptr;
    Py_ssize_t size = 0;
    if (PyBytes_AsStringAndSize(hash, &text, &size) != 0) return PyErr_Clear(), false;  // no block has such a hash
    for (const std::string& suffix : all_) {
      if (size_t(size) >= suffix.size() && is_equal(text + size - suffix.size(), suffix)) return true;
    }
    return false;
  }

 private:
  static bool is_equal(const char* end, const std::string& suffix) {
    if (suffix.size() != sizeof(uint32_t)) return std::memcmp(end, suffix.data(), suffix.size()) == 0;
    return std::memcmp(end, suffix.data(), sizeof(uint32_t)) == 0;  // no call
  }
  std::vector<std::string> all_;
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

// 32-bit numbers as bytes; likewise.
class Numbers {
 public:
  explicit Numbers(Py_ssize_t most) : bytes_(PyBytes_FromStringAndSize(nullptr, most * kSize)), most_(most) {
    if (bytes_ != nullptr) place_ = PyBytes_AsString(bytes_);
  }
  ~Numbers() { Py_XDECREF(bytes_); }
  Numbers(const Numbers&) = delete;
  Numbers& operator=(const Numbers&) = delete;
  bool ok() const { return bytes_ != nullptr; }
  void add(uint32_t number) { std::memcpy(place_ + kSize * count_++, &number, kSize); }
  void drop_all() { count_ = 0; }
  // Borrowed; null with an error.
  PyObject* done() {
    if (count_ < most_) {
      PyObject* whole = bytes_;
      bytes_ = PyBytes_FromStringAndSize(PyBytes_AsString(whole), count_ * kSize);
      Py_DECREF(whole);
    }
    return bytes_;
  }

 private:
  static constexpr Py_ssize_t kSize = sizeof(uint32_t);
  PyObject* bytes_;
  char* place_ = nullptr;
  Py_ssize_t most_;
  Py_ssize_t count_ = 0;
};

// Counts different texts; borrows them.
class Different {
 public:
  explicit Different(Py_ssize_t most) : mask_(1) {
    while (mask_ < 2 * size_t(most)) mask_ *= 2;
    hashes_.resize(mask_);
    texts_.reset(new PyObject*[mask_--]);
  }
  void add(PyObject* text, uint32_t hash) {
    size_t place = hash & mask_;
    for (; hashes_[place] != 0; place = (place + 1) & mask_) {
      if (hashes_[place] == hash && is_same(texts_[place], text)) return;
    }
    hashes_[place] = hash;
    texts_[place] = text;
    count_ += 1;
  }
  Py_ssize_t count() const { return count_; }

 private:
  size_t mask_;
  std::vector<uint32_t> hashes_;  // 0: an empty place
  std::unique_ptr<PyObject*[]> texts_;
  Py_ssize_t count_ = 0;
};

// What `bind_find_cached` binds; strong references.
struct Search {
  PyObject ob_base;
  Queue* queue;
  PyObject* unwanted;
  Index* index;
  Index* coming;
  Suffixes* suffixes;
};

PyTypeObject* search_type = nullptr;

void dealloc_search(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  Search* search = reinterpret_cast<Search*>(self);
  Py_XDECREF(reinterpret_cast<PyObject*>(search->queue));
  Py_XDECREF(search->unwanted);
  Py_XDECREF(reinterpret_cast<PyObject*>(search->index));
  Py_XDECREF(reinterpret_cast<PyObject*>(search->coming));
  delete search->suffixes;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(reinterpret_cast<PyObject*>(type));
}

PyType_Slot search_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(dealloc_search)}, {0, nullptr}};

PyType_Spec search_spec = {"vllm._kv_core.Search", sizeof(Search), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, search_slots};

// The function that `bind_find_cached` returns.
PyObject* find_cached(PyObject* self, PyObject* count) {
  const Search* search = reinterpret_cast<Search*>(self);
  const Py_ssize_t depth = PyLong_AsSsize_t(count);
  if (depth == -1 && PyErr_Occurred()) return nullptr;
  const Queue* queue = search->queue;
  const Index *index = search->index, *coming = search->coming;
  const bool all_wanted = PySet_Size(search->unwanted) == 0;
  const Py_ssize_t most = std::max<Py_ssize_t>(0, std::min(depth, queue->size));
  const bool are_empty = index->used == 0 && coming->used == 0;
  const auto lack = [=](PyObject* text, uint32_t hash) {
    return are_empty || (find_entry(index, text, hash) == kNowhere && find_entry(coming, text, hash) == kNowhere);
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
  Numbers token_counts(has_all ? 0 : most);
  if (!token_counts.ok()) return nullptr;
  Scout scout(queue, index);
  Different absent(has_all ? 0 : most);
  if (!has_all) block = queue->head->next;
  for (Py_ssize_t i = 0; !has_all && i < most && block != nullptr && block != queue->tail; ++i, block = block->next) {
    scout.step();
    last = block;
    if (block->hash == nullptr || !search->suffixes->end(block->hash)) continue;
    const int unwanted = all_wanted ? 0 : PySet_Contains(search->unwanted, block->hash);
    if (unwanted < 0) return nullptr;
    if (unwanted > 0) continue;
    blocks.add(as_object(block));
    hashes.add(block->hash);
    token_counts.add(block->num_tokens);
    const uint32_t hash = hash_of(block->hash);
    if (lack(block->hash, hash)) absent.add(block->hash, hash);
  }
  if (absent.count() == 0) blocks.drop_all(), hashes.drop_all(), token_counts.drop_all();
  PyObject *found = blocks.done(), *keys = hashes.done(), *counts = token_counts.done();
  if (found == nullptr || keys == nullptr || counts == nullptr) return nullptr;
  return Py_BuildValue("OOOnO", found, keys, counts, absent.count(), last == nullptr ? Py_None : as_object(last));
}

PyMethodDef find_cached_definition = {"find_cached", find_cached, METH_O, nullptr};

}  // namespace

bool add_search_type(PyObject*) {
  search_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&search_spec));
  return search_type != nullptr;
}

// bind_find_cached(queue, suffixes, unwanted, index, coming) -> function of a depth, which returns (blocks, hashes, token counts,
// number, last): of the first `depth` blocks those whose hash ends with one of the suffixes and is not in the set `unwanted`,
// the tokens that these hashes cover as in `pack_token_counts`, how many different ones of them are in neither index, and the
// last block looked at or None. No blocks, hashes and counts where there is no such one.
PyObject* bind_find_cached(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (wrong_count("bind_find_cached", count, 5)) return nullptr;
  if (!PyObject_TypeCheck(args[0], queue_type) || !PyAnySet_Check(args[2])) {
    PyErr_SetString(PyExc_TypeError, "bind_find_cached needs a native queue and a set");
    return nullptr;
  }
  if (as_index(args[3]) == nullptr || as_index(args[4]) == nullptr) return nullptr;
  PyObject* object = PyType_GenericAlloc(search_type, 0);
  if (object == nullptr) return nullptr;
  Search* search = reinterpret_cast<Search*>(object);
  search->queue = held<Queue>(args[0]);
  search->unwanted = held<PyObject>(args[2]);
  search->index = held<Index>(args[3]);
  search->coming = held<Index>(args[4]);
  search->suffixes = new Suffixes;
  PyObject* function = search->suffixes->add_all(args[1]) ? PyCFunction_New(&find_cached_definition, object) : nullptr;
  Py_DECREF(object);
  return function;
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

}  // namespace kv_core
