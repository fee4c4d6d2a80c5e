#include "unchanged.hpp"

namespace lowtide {
namespace {

PyObject* at(const nb::tuple& row, Py_ssize_t place) {
    return PyTuple_GetItem(row.ptr(), place);  // borrowed
}

// Whether `holds(place)` for all of them. An error of Python's, a key that is gone say, means no.
template <class Holds>
bool all_of(const nb::tuple& row, Holds holds) {
    const Py_ssize_t count = PyTuple_Size(row.ptr());
    for (Py_ssize_t place = 0; place < count; ++place) {
        if (!holds(place)) {
            PyErr_Clear();
            return false;
        }
    }
    return true;
}

bool has_item(PyObject* mapping, PyObject* key, PyObject* item) {
    if (PyDict_CheckExact(mapping)) return PyDict_GetItemWithError(mapping, key) == item;
    PyObject* const found = PyObject_GetItem(mapping, key);
    Py_XDECREF(found);
    return found == item;
}

bool has_key(PyObject* mapping, PyObject* key) {
    const int found = PyDict_CheckExact(mapping) ? PyDict_Contains(mapping, key) : PySequence_Contains(mapping, key);
    return found != 0;  // an error as well: nothing to be sure of
}

}  // namespace

bool are_of_types(nb::tuple objects, nb::tuple types) {
    return all_of(objects, [&](Py_ssize_t place) {
        return reinterpret_cast<PyObject*>(Py_TYPE(at(objects, place))) == at(types, place);
    });
}

bool have_dictionaries(nb::tuple objects, nb::tuple dictionaries) {
    return all_of(objects, [&](Py_ssize_t place) {
        PyObject* const found = PyObject_GenericGetDict(at(objects, place), nullptr);
        Py_XDECREF(found);
        return found != nullptr && found == at(dictionaries, place);
    });
}

bool have_attributes(nb::tuple objects, nb::tuple names, nb::tuple values) {
    return all_of(objects, [&](Py_ssize_t place) {
        PyObject* const found = PyObject_GetAttr(at(objects, place), at(names, place));
        Py_XDECREF(found);
        return found != nullptr && found == at(values, place);
    });
}

bool have_items(nb::tuple mappings, nb::tuple keys, nb::tuple items) {
    return all_of(mappings, [&](Py_ssize_t place) { return has_item(at(mappings, place), at(keys, place), at(items, place)); });
}

bool have_no_items(nb::tuple mappings, nb::tuple keys) {
    return all_of(mappings, [&](Py_ssize_t place) { return !has_key(at(mappings, place), at(keys, place)); });
}

bool are_empty(nb::tuple dictionaries) {
    return all_of(dictionaries, [&](Py_ssize_t place) { return PyDict_Size(at(dictionaries, place)) == 0; });
}

bool have_values(nb::tuple dictionaries, nb::tuple values) {
    const Py_ssize_t count = PyTuple_Size(values.ptr());
    Py_ssize_t next = 0;
    const bool same = all_of(dictionaries, [&](Py_ssize_t place) {
        PyObject* const dictionary = at(dictionaries, place);
        if (PyDict_Size(dictionary) > count - next) return false;
        Py_ssize_t position = 0;
        PyObject *key, *value;
        while (PyDict_Next(dictionary, &position, &key, &value)) {
            if (value != at(values, next++)) return false;
        }
        return true;
    });
    return same && next == count;
}

}  // namespace lowtide
