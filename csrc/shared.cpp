// What all native modules are made of, as one compilation: reading pybind11's headers takes longer than all else here.
#include "bind_tables.cpp"
#include "exchange.cpp"
#include "lists.cpp"
#include "rows.cpp"
#include "table.cpp"
#include "table_reading.cpp"
#include "tensor_info.cpp"
