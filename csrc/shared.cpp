// All that reads Python objects, as one compilation: for most of these, reading the headers takes longest.
#include "bindings.cpp"
#include "exchange.cpp"
#include "lists.cpp"
#include "rows.cpp"
#include "table.cpp"
#include "table_reading.cpp"
#include "tensor_info.cpp"
