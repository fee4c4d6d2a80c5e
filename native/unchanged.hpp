// Whether Python's objects are put together as they were, told by identities alone, in some nanoseconds each. All arguments
// are tuples, whose items belong together by their places.
#pragma once

#include "python.hpp"

namespace lowtide {

bool are_of_types(nb::tuple objects, nb::tuple types);
bool have_dictionaries(nb::tuple objects, nb::tuple dictionaries);  // of their attributes
bool have_attributes(nb::tuple objects, nb::tuple names, nb::tuple values);
bool have_items(nb::tuple mappings, nb::tuple keys, nb::tuple items);
bool have_no_items(nb::tuple mappings, nb::tuple keys);
bool are_empty(nb::tuple dictionaries);
bool have_values(nb::tuple dictionaries, nb::tuple values);  // those of all, one after the other

}  // namespace lowtide
