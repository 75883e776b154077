#include "hook.h"

#include <structmember.h>

#include <cstddef>

#include "tensor_info.h"

namespace fa {
namespace {

struct Pulse {
  PyObject_HEAD
  long long task, entering;
  int watch;
};

struct Hook {
  PyObject_HEAD
  long long ptr, version;
  Pulse* pulse;
};

constexpr long long kNoTask = -2;

// Kept for good.
PyObject *pulse_class, *slow_name;
PyObject* task_id;  // torch's function

int start_pulse(PyObject* self, PyObject*, PyObject*) {
  reinterpret_cast<Pulse*>(self)->task = kNoTask;
  reinterpret_cast<Pulse*>(self)->entering = kNoTask;
  return 0;
}

int start_hook(PyObject* self, PyObject* args, PyObject*) {
  PyObject* pulse;
  if (!PyArg_ParseTuple(args, "O!", reinterpret_cast<PyTypeObject*>(pulse_class), &pulse)) return -1;
  Hook* hook = reinterpret_cast<Hook*>(self);
  Py_INCREF(pulse);
  Py_XDECREF(reinterpret_cast<PyObject*>(hook->pulse));
  hook->pulse = reinterpret_cast<Pulse*>(pulse);
  hook->ptr = -1;
  return 0;
}

void end_hook(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  Py_XDECREF(reinterpret_cast<PyObject*>(reinterpret_cast<Hook*>(self)->pulse));
  type->tp_free(self);
  Py_DECREF(type);
}

// Whether grad's version is at most one above the last: 1, 0, or -1 with a Python error.
int note_version(Hook* hook, PyObject* grad) {
  PyObject* found = tensor_attributes().version.get(grad);
  if (!found) return -1;
  const long long version = PyLong_AsLongLong(found);
  Py_DECREF(found);
  if (version > hook->version + 1) return 0;
  hook->version = version;
  return PyErr_Occurred() ? -1 : 1;
}

// The running task, kNoTask - 1 with a Python error.
long long running_task() {
  PyObject* running = PyObject_CallNoArgs(task_id);
  if (!running) return kNoTask - 1;
  const long long task = PyLong_AsLongLong(running);
  Py_DECREF(running);
  return PyErr_Occurred() ? kNoTask - 1 : task;
}

// Whether there is nothing to do while `task` runs: 1, 0, or -1 with a Python error.
int idle(Hook* hook, PyObject* param, long long task) {
  if (!hook->pulse || hook->pulse->watch == kAll || task != hook->pulse->task) return 0;
  PyObject* grad = tensor_attributes().grad.get(param);
  if (!grad) return -1;
  TensorInfo info;
  int known = grad == Py_None;
  if (!known && read_tensor(grad, info) && reinterpret_cast<long long>(info.data) == hook->ptr) {
    known = hook->pulse->watch == kVersions ? note_version(hook, grad) : 1;
  }
  Py_DECREF(grad);
  return known;
}

PyObject* call_hook(PyObject* self, PyObject* args, PyObject*) {
  PyObject* param;
  if (!PyArg_UnpackTuple(args, "hook", 1, 1, &param)) return nullptr;
  const long long task = running_task();
  if (task < kNoTask) return nullptr;
  const int nothing = idle(reinterpret_cast<Hook*>(self), param, task);
  if (nothing < 0) return nullptr;
  if (nothing) Py_RETURN_NONE;
  // Noted before any Python runs: a signal's exception is raised by the first that does.
  Pulse* pulse = reinterpret_cast<Hook*>(self)->pulse;
  if (pulse && pulse->entering == kNoTask) pulse->entering = task;
  return PyObject_CallMethodObjArgs(self, slow_name, param, nullptr);
}

PyMemberDef pulse_members[] = {{"task", T_LONGLONG, offsetof(Pulse, task), 0, nullptr},
                               {"entering", T_LONGLONG, offsetof(Pulse, entering), 0, nullptr},
                               {"watch", T_INT, offsetof(Pulse, watch), 0, nullptr},
                               {nullptr, 0, 0, 0, nullptr}};
PyType_Slot pulse_slots[] = {{Py_tp_init, reinterpret_cast<void*>(start_pulse)},
                             {Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)},
                             {Py_tp_members, pulse_members},
                             {0, nullptr}};
PyType_Spec pulse_spec = {"fused_accum._C.Pulse", sizeof(Pulse), 0, Py_TPFLAGS_DEFAULT, pulse_slots};

PyMemberDef hook_members[] = {{"ptr", T_LONGLONG, offsetof(Hook, ptr), 0, nullptr},
                              {"version", T_LONGLONG, offsetof(Hook, version), 0, nullptr},
                              {"pulse", T_OBJECT_EX, offsetof(Hook, pulse), READONLY, nullptr},
                              {nullptr, 0, 0, 0, nullptr}};
PyType_Slot hook_slots[] = {{Py_tp_init, reinterpret_cast<void*>(start_hook)},
                            {Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)},
                            {Py_tp_dealloc, reinterpret_cast<void*>(end_hook)},
                            {Py_tp_call, reinterpret_cast<void*>(call_hook)},
                            {Py_tp_members, hook_members},
                            {0, nullptr}};
PyType_Spec hook_spec = {"fused_accum._C.Hook", sizeof(Hook), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, hook_slots};

}  // namespace

PyObject* hook_types(PyObject* current_task_id) {
  Py_INCREF(current_task_id);
  task_id = current_task_id;
  slow_name = PyUnicode_InternFromString("slow");
  pulse_class = PyType_FromSpec(&pulse_spec);
  PyObject* hook_class = pulse_class ? PyType_FromSpec(&hook_spec) : nullptr;
  return hook_class ? Py_BuildValue("ON", pulse_class, hook_class) : nullptr;
}

}  // namespace fa
