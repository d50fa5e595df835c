/** Small questions about values that came from outside. */

const MAX_F32 = 3.4028234663852886e38;

/** @param {unknown} value @returns {value is string} without half surrogate pairs, which JSON can smuggle in */
export const isText = (value) => typeof value === 'string' && !/\p{Surrogate}/u.test(value);

/** @param {unknown} value @returns {value is number} a finite number */
export const isNumber = (value) => typeof value === 'number' && Number.isFinite(value);

/** @param {unknown} value @returns {value is number} an integer from 0 on */
export const isId = (value) => Number.isSafeInteger(value) && Number(value) >= 0;

/** @param {unknown} value @returns {value is number} an integer from 1 on */
export const isCount = (value) => isId(value) && value > 0;

/** @param {unknown} value @returns {value is number} a size that kernels can count to */
export const isSize = (value) => isCount(value) && value < 2 ** 31;

/** @param {unknown} value @returns {value is number} a number that f32 holds */
export const isFloat = (value) => isNumber(value) && Math.abs(value) <= MAX_F32;

/** @param {unknown} value @returns {value is Record<string, any>} */
export const isObject = (value) => typeof value === 'object' && value !== null && !Array.isArray(value);

/** @param {unknown} value @returns {string} short enough for a message */
export function show(value) {
  const text = JSON.stringify(value) ?? 'missing';
  return text.length > 80 ? `${text.slice(0, 77)}...` : text;
}
