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

PyObject* popleft(PyObject* self, PyObject*) {
  PyObject* taken = pop_front(self_of(self), 1);
  if (taken == nullptr) return nullptr;
  PyObject* block = PyList_GetItem(taken, 0);
  Py_INCREF(block);
  Py_DECREF(taken);
  return block;
}

PyObject* popleft_n(PyObject* self, PyObject* count) {
  const Py_ssize_t number = PyLong_AsSsize_t(count);
  if (number == -1 && PyErr_Occurred()) return nullptr;
  return pop_front(self_of(self), number);
}

PyObject* remove_block(PyObject* self, PyObject* object) {
  Block* block = as_block(object);
  if (block == nullptr || !unlink(self_of(self), block)) return nullptr;
  Py_RETURN_NONE;
}

PyObject* append(PyObject* self, PyObject* object) {
  PyObject* one = PyTuple_Pack(1, object);
  if (one == nullptr) return nullptr;
  PyObject* done = insert_after(self_of(self), self_of(self)->tail->previous, one);
  Py_DECREF(one);
  return done;
}

PyObject* append_n(PyObject* self, PyObject* blocks) {
  return insert_after(self_of(self), self_of(self)->tail->previous, blocks);
}

PyObject* prepend_n(PyObject* self, PyObject* blocks) {
  return insert_in_front(self_of(self), blocks);
}

PyObject* put_back(PyObject* self, PyObject* blocks) {
  Queue* queue = self_of(self);
  Block* last = queue->last_blank;
  while (last->next != nullptr && last->next != queue->tail && last->next->hash == nullptr) last = last->next;
  assign(queue->last_blank, last);
  return insert_after(queue, last, blocks);
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
  Block* block = walk->last == nullptr ? nullptr : walk->last->next;
  if (block == walk->end) block = nullptr;
  assign(walk->last, block);
  Py_XINCREF(as_object(block));
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

constexpr char kBlock[] = "block", kCursor[] = "cursor", kBlocks[] = "blocks", kNumber[] = "n";

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

PyObject* pop_front(Queue* queue, Py_ssize_t count) {
  if (count < 0 || count > queue->size) {
    PyErr_Format(PyExc_ValueError, "%zd free blocks wanted, %zd left", count, queue->size);
    return nullptr;
  }
  PyObject* taken = PyList_New(count);
  for (Py_ssize_t i = 0; taken != nullptr && i < count; ++i) {
    Block* block = queue->head->next;
    if (block == nullptr || block == queue->tail) {
      PyErr_SetString(PyExc_RuntimeError, "the free queue is shorter than its count");
      Py_CLEAR(taken);
      break;
    }
    Py_INCREF(as_object(block));
    PyList_SetItem(taken, i, as_object(block));
    if (!unlink(queue, block)) Py_CLEAR(taken);
  }
  return taken;
}

bool add_queue_type(PyObject* module) {
  queue_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  walk_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&walk_spec));
  return queue_type != nullptr && walk_type != nullptr && PyModule_AddObjectRef(module, "FreeQueue", reinterpret_cast<PyObject*>(queue_type)) == 0;
}

}  // namespace kv_core
