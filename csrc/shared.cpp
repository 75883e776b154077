// All that pybind11 binds, as one compilation: to read its headers and to compile them takes longer than all else here.
#include "bind_tables.cpp"
#include "bindings.cpp"
#include "exchange.cpp"
#include "lists.cpp"
#include "rows.cpp"
#include "table.cpp"
#include "table_reading.cpp"
#include "tensor_info.cpp"
