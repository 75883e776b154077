// The hook that a parameter has while backward accumulates into its buffer: what nearly every call of it needs.
#pragma once

#include <Python.h>

namespace fa {

// Pulse: what the hooks of one optimizer share. `task`: id of the graph task whose hook came last, -2 where there is
// none; `watch`: what a hook has to do beside looking where p.grad is, of enum Watch.
//
// Hook(pulse): a base class. Called with a parameter it returns at once where `task` is the running one and p.grad is
// None or lies at `ptr` (an address; -1: nowhere). Else, and where it finds more to do, it calls its own method `slow`
// with the parameter. fused_accum/slots.py has the same in Python.
enum Watch {
  kNothing,
  kVersions,  // note p.grad's in `version`; more to do where it is more than one above the one before
  kAll,       // more to do every time
};

// A tuple of the two as new Python types, to be made once; null with a Python error. current_task_id: torch's function.
PyObject* hook_types(PyObject* current_task_id);

}  // namespace fa
