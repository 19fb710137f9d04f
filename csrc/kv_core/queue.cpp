// The ordered list of blocks nobody holds.
#include "records.h"

namespace kv_core {

PyTypeObject* queue_type = nullptr;

namespace {

Queue* self_of(PyObject* self) { return reinterpret_cast<Queue*>(self); }

// Puts a block that is not queued between two neighbours. Moves the references of their links over.
void link_between(Block* before, Block* block, Block* after) {
  block->previous = after->previous;  // the reference to `before` that `after` held
  block->next = before->next;
  Py_INCREF(as_object(block));
  Py_INCREF(as_object(block));
  before->next = block;
  after->previous = block;
}

// The block joins the queue as its youngest.
void start_age(Queue* queue, const Block* block) {
  if (queue->ages != nullptr && block->id >= 0 && block->id < queue->num_ages) queue->ages[block->id] = queue->next_age++;
}

uint64_t age_of(const Queue* queue, const Block* block) {
  return queue->ages != nullptr && block->id >= 0 && block->id < queue->num_ages ? queue->ages[block->id] : 0;
}

PyObject* insert_after(Queue* queue, Block* cursor, PyObject* blocks) {
  Items items(blocks);
  if (!items.ok()) return nullptr;
  Block* after = cursor == nullptr ? nullptr : cursor->next;
  if (after == nullptr || after->previous != cursor) {
    PyErr_SetString(PyExc_RuntimeError, "the place to insert at is not in the free queue");
    return nullptr;
  }
  for (Py_ssize_t i = 0, n = items.size(); i < n; ++i) {
    Block* block = as_block(items[i]);
    if (block == nullptr) return nullptr;
    if (block->previous != nullptr || block->next != nullptr) {
      PyErr_Format(PyExc_RuntimeError, "block %d is already in the free queue", block->id);
      return nullptr;
    }
    link_between(cursor, block, after);
    queue->size += 1;
    cursor = block;
  }
  Py_RETURN_NONE;
}

// As `insert_after` the head; the first ones without a hash are the blank blocks in front where there are none yet.
PyObject* insert_in_front(Queue* queue, PyObject* blocks) {
  Items items(blocks);
  PyObject* done = items.ok() ? insert_after(queue, queue->head, items.object()) : nullptr;
  if (done == nullptr || queue->last_blank != queue->head) return done;
  Block* last = queue->head;
  for (Py_ssize_t i = 0, n = items.size(); i < n && last->next != queue->tail && last->next->hash == nullptr; ++i) last = last->next;
  assign(queue->last_blank, last);
  return done;
}

void take_apart(Queue* queue) {
  PyMem_Free(queue->ages);
  Block* block = queue->head;
  while (block != nullptr) {  // the references of links hold each next block until its turn
    Block* next = block->next;
    block->next = nullptr;
    Block* previous = block->previous;
    block->previous = nullptr;
    Py_XDECREF(as_object(previous));
    if (block != queue->head) Py_DECREF(as_object(block));
    block = next;
  }
}

int init(PyObject* self, PyObject* args, PyObject*) {
  PyObject *head = nullptr, *tail = nullptr, *blocks = nullptr;
  if (!PyArg_ParseTuple(args, "OOO", &head, &tail, &blocks)) return -1;
  Block* first = as_block(head);
  Block* last = first == nullptr ? nullptr : as_block(tail);
  if (last == nullptr) return -1;
  Queue* queue = self_of(self);
  if (queue->head != nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "a queue is initialised once");
    return -1;
  }
  assign(queue->head, first);
  assign(queue->tail, last);
  assign(queue->last_blank, first);
  assign(first->next, last);
  assign(last->previous, first);
  PyObject* done = insert_in_front(queue, blocks);
  Py_XDECREF(done);
  return done == nullptr ? -1 : 0;
}

void dealloc(PyObject* self) {
  Queue* queue = self_of(self);
  PyTypeObject* type = Py_TYPE(self);
  take_apart(queue);
  Py_XDECREF(as_object(queue->last_blank));
  Py_XDECREF(as_object(queue->head));
  Py_XDECREF(as_object(queue->tail));
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(reinterpret_cast<PyObject*>(type));
}

PyObject* pop(Queue* queue, Py_ssize_t count) {
  if (count < 0 || count > queue->size) {
    return PyErr_Format(PyExc_ValueError, "%zd free blocks wanted, %zd left", count, queue->size);
  }
  return pop_front(queue, count, [](Block*) { return true; });
}

PyObject* popleft(PyObject* self, PyObject*) {
  PyObject* taken = pop(self_of(self), 1);
  if (taken == nullptr) return nullptr;
  PyObject* block = PyList_GetItem(taken, 0);
  Py_INCREF(block);
  Py_DECREF(taken);
  return block;
}

PyObject* popleft_n(PyObject* self, PyObject* count) {
  const Py_ssize_t number = PyLong_AsSsize_t(count);
  if (number == -1 && PyErr_Occurred()) return nullptr;
  return pop(self_of(self), number);
}

PyObject* remove_block(PyObject* self, PyObject* object) {
  Block* block = as_block(object);
  if (block == nullptr || !unlink(self_of(self), block)) return nullptr;
  Py_RETURN_NONE;
}

PyObject* append_n(PyObject* self, PyObject* blocks) {
  Queue* queue = self_of(self);
  if (queue->ages == nullptr) return insert_after(queue, queue->tail->previous, blocks);
  Items items(blocks);
  if (!items.ok()) return nullptr;
  PyObject* done = insert_after(queue, queue->tail->previous, items.object());
  for (Py_ssize_t i = 0, n = items.size(); done != nullptr && i < n; ++i) {
    start_age(queue, reinterpret_cast<Block*>(items[i]));
  }
  return done;
}

PyObject* append(PyObject* self, PyObject* object) {
  PyObject* one = PyTuple_Pack(1, object);
  PyObject* done = one == nullptr ? nullptr : append_n(self, one);
  Py_XDECREF(one);
  return done;
}

PyObject* prepend_n(PyObject* self, PyObject* blocks) {
  return insert_in_front(self_of(self), blocks);
}

Block* find_last_blank(Queue* queue) {
  Block* last = queue->last_blank;
  while (last->next != nullptr && last->next != queue->tail && last->next->hash == nullptr) last = last->next;
  assign(queue->last_blank, last);
  return last;
}

PyObject* put_back(PyObject* self, PyObject* blocks) {
  return insert_after(self_of(self), find_last_blank(self_of(self)), blocks);
}

PyObject* put_by_age(PyObject* self, PyObject* blocks) {
  Queue* queue = self_of(self);
  Items items(blocks);
  if (!items.ok()) return nullptr;
  Block* last = find_last_blank(queue);
  for (Py_ssize_t i = 0, n = items.size(); i < n; ++i) {
    Block* block = as_block(items[i]);
    if (block == nullptr) return nullptr;
    const uint64_t age = age_of(queue, block);
    while (last->next != nullptr && last->next != queue->tail && age_of(queue, last->next) < age) last = last->next;
    PyObject* one = PyTuple_Pack(1, as_object(block));
    PyObject* done = one == nullptr ? nullptr : insert_after(queue, last, one);
    Py_XDECREF(one);
    if (done == nullptr) return nullptr;
    Py_DECREF(done);
    last = block;
  }
  Py_RETURN_NONE;
}

PyObject* keep_ages(PyObject* self, PyObject* count) {
  Queue* queue = self_of(self);
  const Py_ssize_t number = PyLong_AsSsize_t(count);
  if (number == -1 && PyErr_Occurred()) return nullptr;
  if (number < 0) return PyErr_Format(PyExc_ValueError, "ages of %zd blocks", number);
  if (queue->ages != nullptr) Py_RETURN_NONE;
  queue->ages = static_cast<uint64_t*>(PyMem_Calloc(size_t(number), sizeof(uint64_t)));
  if (queue->ages == nullptr) return PyErr_NoMemory();
  queue->num_ages = number;
  queue->next_age = 1;
  for (Block* block = queue->head->next; block != nullptr && block != queue->tail; block = block->next) start_age(queue, block);
  Py_RETURN_NONE;
}

PyObject* look_again(PyObject* self, PyObject*) {
  assign(self_of(self)->last_blank, self_of(self)->head);
  Py_RETURN_NONE;
}

PyObject* clear(PyObject* self, PyObject*) {
  Queue* queue = self_of(self);
  assign(queue->last_blank, queue->tail->previous);
  Py_RETURN_NONE;
}

PyObject* insert_n_after(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (wrong_count("insert_n_after", count, 2)) return nullptr;
  Block* cursor = as_block(args[0]);
  return cursor == nullptr ? nullptr : insert_after(self_of(self), cursor, args[1]);
}

PyObject* get_all_free_blocks(PyObject* self, PyObject*) {
  PyObject* all = PyList_New(0);
  Queue* queue = self_of(self);
  for (Block* block = queue->head->next; all != nullptr && block != nullptr && block != queue->tail; block = block->next) {
    if (PyList_Append(all, as_object(block)) != 0) Py_CLEAR(all);
  }
  return all;
}

// Walks the links as it goes: the block given last is asked for its successor.
struct Walk {
  PyObject ob_base;
  Block* last;
  Block* end;
};

PyTypeObject* walk_type = nullptr;

PyObject* walk_next(PyObject* self) {
  Walk* walk = reinterpret_cast<Walk*>(self);
  Block* last = walk->last;
  Block* block = last == nullptr ? nullptr : last->next;
  if (block == walk->end) block = nullptr;
  expect_followers(last, block);
  walk->last = block;  // its reference to the last one goes to the new one
  Py_XINCREF(as_object(block));
  Py_XINCREF(as_object(block));
  Py_XDECREF(as_object(last));
  return as_object(block);
}

void walk_dealloc(PyObject* self) {
  Walk* walk = reinterpret_cast<Walk*>(self);
  PyTypeObject* type = Py_TYPE(self);
  Py_XDECREF(as_object(walk->last));
  Py_XDECREF(as_object(walk->end));
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(reinterpret_cast<PyObject*>(type));
}

PyType_Slot walk_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(walk_dealloc)},
    {Py_tp_iter, reinterpret_cast<void*>(PyObject_SelfIter)},
    {Py_tp_iternext, reinterpret_cast<void*>(walk_next)},
    {0, nullptr},
};

PyType_Spec walk_spec = {"vllm._kv_core.Walk", sizeof(Walk), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                         walk_slots};

PyObject* iter_blocks_after(PyObject* self, PyObject* cursor) {
  Queue* queue = self_of(self);
  Block* start = cursor == Py_None ? queue->head : as_block(cursor);
  if (start == nullptr) return nullptr;
  if (start->next == nullptr) {
    return PyErr_Format(PyExc_RuntimeError, "block %d is not in the free queue", start->id);
  }
  PyObject* walk = PyType_GenericAlloc(walk_type, 0);
  if (walk == nullptr) return nullptr;
  assign(reinterpret_cast<Walk*>(walk)->last, start);
  assign(reinterpret_cast<Walk*>(walk)->end, queue->tail);
  return walk;
}

// A method of one argument that may be given by name, as the reference in Python takes it.
using Method = PyObject* (*)(PyObject*, PyObject*);
template <Method method, const char* name>
PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  const Py_ssize_t named = keywords == nullptr ? 0 : PyTuple_Size(keywords);
  if (count + named == 1 && (named == 0 || PyUnicode_CompareWithASCIIString(PyTuple_GetItem(keywords, 0), name) == 0)) {
    return method(self, args[0]);
  }
  PyErr_Format(PyExc_TypeError, "one argument is needed: %s", name);
  return nullptr;
}

constexpr char kBlock[] = "block", kCursor[] = "cursor", kBlocks[] = "blocks", kNumber[] = "n",
               kCount[] = "num_blocks";

template <Method method, const char* name>
PyCFunction named() {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call<method, name>));
}

constexpr int kNamed = METH_FASTCALL | METH_KEYWORDS;

PyMemberDef members[] = {
    {"num_free_blocks", T_PYSSIZET, offsetof(Queue, size), 0, nullptr},
    {"fake_free_list_head", T_OBJECT, offsetof(Queue, head), READONLY, nullptr},
    {"fake_free_list_tail", T_OBJECT, offsetof(Queue, tail), READONLY, nullptr},
    {"last_blank", T_OBJECT, offsetof(Queue, last_blank), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyMethodDef methods[] = {
    {"popleft", popleft, METH_NOARGS, "popleft($self)\n--\n\nTake the block at the front."},
    {"popleft_n", named<popleft_n, kNumber>(), kNamed, "popleft_n($self, n)\n--\n\nTake `n` blocks from the front."},
    {"remove", named<remove_block, kBlock>(), kNamed, "remove($self, block)\n--\n\nTake `block` out of the middle."},
    {"append", named<append, kBlock>(), kNamed, "append($self, block)\n--\n\nPut `block` at the tail."},
    {"append_n", named<append_n, kBlocks>(), kNamed, "append_n($self, blocks)\n--\n\nPut `blocks` at the tail."},
    {"prepend_n", named<prepend_n, kBlocks>(), kNamed, "prepend_n($self, blocks)\n--\n\nPut `blocks` at the front."},
    {"put_back", named<put_back, kBlocks>(), kNamed,
     "put_back($self, blocks)\n--\n\nPut `blocks` at the front, but behind blocks there without a hash."},
    {"put_by_age", named<put_by_age, kBlocks>(), kNamed,
     "put_by_age($self, blocks)\n--\n\nAs `put_back`, but behind whatever there is older."},
    {"keep_ages", named<keep_ages, kCount>(), kNamed,
     "keep_ages($self, num_blocks)\n--\n\nRemember from now on in which order blocks came to the tail."},
    {"look_again", look_again, METH_NOARGS, "look_again($self)\n--\n\nA queued block may have got a hash where it is."},
    {"clear", clear, METH_NOARGS, "clear($self)\n--\n\nNo queued block has a hash any more."},
    {"insert_n_after", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(insert_n_after)), METH_FASTCALL,
     "insert_n_after($self, cursor, blocks, /)\n--\n\nPut `blocks` behind `cursor`."},
    {"iter_blocks_after", named<iter_blocks_after, kCursor>(), kNamed,
     "iter_blocks_after($self, cursor)\n--\n\nQueued blocks behind `cursor`, or all for None, in order."},
    {"get_all_free_blocks", get_all_free_blocks, METH_NOARGS, "get_all_free_blocks($self)\n--\n\nAll queued blocks."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_init, reinterpret_cast<void*>(init)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)},
    {Py_tp_members, members},
    {Py_tp_methods, methods},
    {0, nullptr},
};

PyType_Spec spec = {"vllm._kv_core.FreeQueue", sizeof(Queue), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};

}  // namespace

bool unlink(Queue* queue, Block* block) {
  Block *before = block->previous, *after = block->next;
  if (before == nullptr || after == nullptr) {
    PyErr_Format(PyExc_RuntimeError, "block %d is not in the free queue", block->id);
    return false;
  }
  if (block == queue->last_blank) assign(queue->last_blank, before->hash == nullptr ? before : queue->head);
  before->next = after;  // the references of the block's own links go to its neighbours
  after->previous = before;
  block->previous = block->next = nullptr;
  queue->size -= 1;
  Py_DECREF(as_object(block));
  Py_DECREF(as_object(block));
  return true;
}

bool add_queue_type(PyObject* module) {
  queue_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  walk_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&walk_spec));
  return queue_type != nullptr && walk_type != nullptr && PyModule_AddObjectRef(module, "FreeQueue", reinterpret_cast<PyObject*>(queue_type)) == 0;
}

}  // namespace kv_core
