/**
 * Messages between a page (client.js) and its worker (worker.js), told apart by `kind`. A call has a number; all that
 * belongs to it carries the same one.
 *
 * @typedef {import('./errors.js').ErrorMessage} ErrorMessage
 * @typedef {import('./progress.js').ProgressEvent} ProgressEvent
 * @typedef {import('./completion.js').ChatCompletionChunk} ChatCompletionChunk
 * @typedef {import('./tokenizer.js').Message} Message
 * @typedef {Omit<import('./chat.js').ChatRequest, 'signal'|'stream'>} PlainRequest
 * @typedef {Pick<import('./prepare.js').LoadOptions, 'contextLength'|'kvCache'|'prefillChunk'|'retry'|'kernels'> & {shadersUrl?: string}} PlainOptions
 *
 * From the page:
 * @typedef {{kind: 'support'}|{kind: 'plan', url: string, options: PlainOptions}
 *   |{kind: 'load', url: string, options: PlainOptions}|{kind: 'stored', url: string}|{kind: 'remove', url: string}
 *   |{kind: 'countTokens', engine: number, messages: Message[]}|{kind: 'encode', engine: number, text: string}
 *   |{kind: 'decode', engine: number, ids: number[]}|{kind: 'chat', engine: number, request: PlainRequest}
 *   |{kind: 'measure', engine: number, quick?: boolean}|{kind: 'dispose', engine: number}} Request
 * @typedef {(Request & {call: number})|{kind: 'abort', call: number}} ToWorker
 *
 * From the worker:
 * @typedef {{kind: 'result', call: number, value: any}|{kind: 'error', call: number, error: ErrorMessage}
 *   |{kind: 'progress', call: number, event: ProgressEvent}|{kind: 'started', call: number}
 *   |{kind: 'measuring', call: number, progress: import('./measure.js').MeasureProgress}
 *   |{kind: 'chunk', call: number, chunk: ChatCompletionChunk}|{kind: 'lost', engine: number, error: ErrorMessage}} FromWorker
 */
export {};
